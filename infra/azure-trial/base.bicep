metadata description = 'What the trial needs before its VMs: identities, the bus and Event Grid of infra/bicep, a network, and storage for the archive that the VMs install.'

param location string = resourceGroup().location
param tags object = {}

@description('Ends every name that must be unique in all of Azure.')
@minLength(6)
@maxLength(12)
param suffix string

@description('Object id of who runs the trial and uploads the archive.')
param uploaderId string
@allowed(['ServicePrincipal', 'User'])
param uploaderType string = 'User'

var blobContributor = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', 'ba92f5b4-2d11-453d-a403-e96b0029c9fe')
var blobReader = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '2a2b9908-6ea1-4ae2-8e65-a410df84e7d1')

resource forward 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: 'imds-forward'
  location: location
  tags: tags
}

resource listen 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: 'imds-listen'
  location: location
  tags: tags
}

// Approves, and reads what arrives.
resource observer 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: 'imds-observer'
  location: location
  tags: tags
}

module bridge '../bicep/main.bicep' = {
  name: 'imds-bridge'
  params: {
    namespaceName: 'imds-trial-${suffix}'
    location: location
    tags: tags
    forwardPrincipalIds: [forward.properties.principalId]
    listenPrincipalIds: [listen.properties.principalId]
    approverPrincipalIds: [observer.properties.principalId]
    approverPrincipalType: 'ServicePrincipal'
    auditPrincipalIds: [observer.properties.principalId]
    auditPrincipalType: 'ServicePrincipal'
    eventGridTopicName: 'imds-trial-${suffix}'
    eventGridIdentity: true
  }
}

resource address 'Microsoft.Network/publicIPAddresses@2024-05-01' = {
  name: 'imds-trial'
  location: location
  tags: tags
  sku: {
    name: 'Standard'
  }
  properties: {
    publicIPAllocationMethod: 'Static'
  }
}

// The VMs have no public address: they reach PyPI and Azure through it, and nobody reaches them.
resource nat 'Microsoft.Network/natGateways@2024-05-01' = {
  name: 'imds-trial'
  location: location
  tags: tags
  sku: {
    name: 'Standard'
  }
  properties: {
    publicIpAddresses: [
      {
        id: address.id
      }
    ]
  }
}

resource network 'Microsoft.Network/virtualNetworks@2024-05-01' = {
  name: 'imds-trial'
  location: location
  tags: tags
  properties: {
    addressSpace: {
      addressPrefixes: ['10.99.0.0/24']
    }
    subnets: [
      {
        name: 'vms'
        properties: {
          addressPrefix: '10.99.0.0/26'
          natGateway: {
            id: nat.id
          }
        }
      }
    ]
  }
}

resource account 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  name: 'imdstrial${suffix}'
  location: location
  tags: tags
  kind: 'StorageV2'
  sku: {
    name: 'Standard_LRS'
  }
  properties: {
    allowSharedKeyAccess: false
    allowBlobPublicAccess: false
    minimumTlsVersion: 'TLS1_2'
  }
}

resource blobs 'Microsoft.Storage/storageAccounts/blobServices@2023-05-01' = {
  parent: account
  name: 'default'
}

resource releases 'Microsoft.Storage/storageAccounts/blobServices/containers@2023-05-01' = {
  parent: blobs
  name: 'releases'
}

resource uploads 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: account
  name: guid(account.id, uploaderId, blobContributor)
  properties: {
    roleDefinitionId: blobContributor
    principalId: uploaderId
    principalType: uploaderType
  }
}

resource downloads 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: account
  name: guid(account.id, forward.id, blobReader)
  properties: {
    roleDefinitionId: blobReader
    principalId: forward.properties.principalId
    principalType: 'ServicePrincipal'
  }
}

output namespace string = bridge.outputs.namespace
output eventGridEndpoint string = bridge.outputs.eventGridEndpoint
output subnetId string = network.properties.subnets[0].id
output forwardId string = forward.id
output listenId string = listen.id
output observerId string = observer.id
output forwardClientId string = forward.properties.clientId
output listenClientId string = listen.properties.clientId
output observerClientId string = observer.properties.clientId
output observerPrincipalId string = observer.properties.principalId
