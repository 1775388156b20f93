metadata description = 'A queue that gets what Event Grid delivers. A new role takes minutes to become effective: deploy it again until it succeeds.'

param namespaceName string
param topicName string

@description('Principal id of the identity that reads the queue.')
param observerPrincipalId string

var dataSender = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '69a216fc-b8fb-44d8-bc22-1f3c2cd27a39')
var dataReceiver = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0')

resource bus 'Microsoft.ServiceBus/namespaces@2024-01-01' existing = {
  name: namespaceName
}

resource topic 'Microsoft.EventGrid/topics@2025-02-15' existing = {
  name: topicName
}

resource queue 'Microsoft.ServiceBus/namespaces/queues@2024-01-01' = {
  parent: bus
  name: 'grid'
  properties: {
    requiresDuplicateDetection: false // each copy is counted
    defaultMessageTimeToLive: 'P1D'
  }
}

resource delivers 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: queue
  name: guid(queue.id, topic.id, dataSender)
  properties: {
    roleDefinitionId: dataSender
    principalId: topic.identity.principalId
    principalType: 'ServicePrincipal'
  }
}

resource reads 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: queue
  name: guid(queue.id, observerPrincipalId, dataReceiver)
  properties: {
    roleDefinitionId: dataReceiver
    principalId: observerPrincipalId
    principalType: 'ServicePrincipal'
  }
}

resource subscription 'Microsoft.EventGrid/topics/eventSubscriptions@2025-02-15' = {
  parent: topic
  name: 'trial'
  properties: {
    eventDeliverySchema: 'CloudEventSchemaV1_0'
    deliveryWithResourceIdentity: {
      identity: {
        type: 'SystemAssigned'
      }
      destination: {
        endpointType: 'ServiceBusQueue'
        properties: {
          resourceId: queue.id
        }
      }
    }
  }
  dependsOn: [
    delivers
  ]
}
