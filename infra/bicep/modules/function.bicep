metadata description = 'A Function app on a Flex Consumption plan that reads its own subscription, without keys.'

param name string
param storageName string
param location string
param tags object
param namespaceName string
param hostName string
param topicName string

@description('Resource id of the subnet of the app; empty: one is created, in a network of its own.')
param subnetId string

@description('Public addresses that may reach the storage, to read the table; without them, only the subnet may.')
param storageAllowedIpRanges string[]

@description('URL of the Key Vault secret with the listeners\' signing secrets; empty: receipts are not checked.')
param signingSecretUrl string

@description('Log Analytics workspace for Application Insights; empty: none.')
param workspaceId string

var subscriptionName = 'function'
var deployments = 'deployments'
var subnetName = 'function'

// The app reaches its storage through this subnet. Its range leads nowhere else, so it cannot collide.
resource network 'Microsoft.Network/virtualNetworks@2024-05-01' = if (empty(subnetId)) {
  name: name
  location: location
  tags: tags
  properties: {
    addressSpace: {
      addressPrefixes: [
        '10.0.0.0/26'
      ]
    }
    subnets: [
      {
        name: subnetName
        properties: {
          addressPrefix: '10.0.0.0/26'
          delegations: [
            {
              name: 'flex-consumption'
              properties: {
                serviceName: 'Microsoft.App/environments'
              }
            }
          ]
          serviceEndpoints: [
            {
              service: 'Microsoft.Storage'
            }
          ]
        }
      }
    ]
  }
}

var appSubnetId = empty(subnetId) ? '${network.id}/subnets/${subnetName}' : subnetId

resource storage 'Microsoft.Storage/storageAccounts@2024-01-01' = {
  name: storageName
  location: location
  tags: tags
  kind: 'StorageV2'
  sku: {
    name: 'Standard_LRS'
  }
  properties: {
    allowSharedKeyAccess: false
    allowBlobPublicAccess: false
    defaultToOAuthAuthentication: true
    minimumTlsVersion: 'TLS1_2'
    supportsHttpsTrafficOnly: true
    networkAcls: {
      defaultAction: 'Deny'
      bypass: 'AzureServices'
      virtualNetworkRules: [
        {
          id: appSubnetId
          action: 'Allow'
        }
      ]
      ipRules: [for ip in storageAllowedIpRanges: {
        value: ip
        action: 'Allow'
      }]
    }
  }
}

resource blobs 'Microsoft.Storage/storageAccounts/blobServices@2024-01-01' = {
  parent: storage
  name: 'default'
}

resource packages 'Microsoft.Storage/storageAccounts/blobServices/containers@2024-01-01' = {
  parent: blobs
  name: deployments
}

resource plan 'Microsoft.Web/serverfarms@2024-04-01' = {
  name: name
  location: location
  tags: tags
  kind: 'functionapp'
  sku: {
    name: 'FC1'
    tier: 'FlexConsumption'
  }
  properties: {
    reserved: true
  }
}

resource insights 'Microsoft.Insights/components@2020-02-02' = if (!empty(workspaceId)) {
  name: name
  location: location
  tags: tags
  kind: 'web'
  properties: {
    Application_Type: 'web'
    WorkspaceResourceId: workspaceId
    DisableLocalAuth: true
  }
}

var settings = [
  {
    name: 'AzureWebJobsStorage__accountName'
    value: storage.name
  }
  {
    name: 'ServiceBusConnection__fullyQualifiedNamespace'
    value: hostName
  }
  {
    name: 'EVENTS_TOPIC'
    value: topicName
  }
  {
    name: 'EVENTS_SUBSCRIPTION'
    value: subscriptionName
  }
  {
    name: 'AUDIT_TABLE_ENDPOINT'
    value: storage.properties.primaryEndpoints.table
  }
]

var insightsSettings = empty(workspaceId) ? [] : [
  {
    name: 'APPLICATIONINSIGHTS_CONNECTION_STRING'
    value: insights!.properties.ConnectionString
  }
  {
    name: 'APPLICATIONINSIGHTS_AUTHENTICATION_STRING'
    value: 'Authorization=AAD'
  }
]

// Each deployment replaces all settings: one that is not here is gone.
var signingSettings = empty(signingSecretUrl) ? [] : [
  {
    name: 'SIGNING_SECRETS'
    value: '@Microsoft.KeyVault(SecretUri=${signingSecretUrl})'
  }
]

resource app 'Microsoft.Web/sites@2024-04-01' = {
  name: name
  location: location
  tags: tags
  kind: 'functionapp,linux'
  identity: {
    type: 'SystemAssigned'
  }
  properties: {
    serverFarmId: plan.id
    virtualNetworkSubnetId: appSubnetId
    httpsOnly: true
    functionAppConfig: {
      deployment: {
        storage: {
          type: 'blobContainer'
          value: '${storage.properties.primaryEndpoints.blob}${deployments}'
          authentication: {
            type: 'SystemAssignedIdentity'
          }
        }
      }
      runtime: {
        name: 'python'
        version: '3.12'
      }
      scaleAndConcurrency: {
        instanceMemoryMB: 2048
        maximumInstanceCount: 40
      }
    }
    siteConfig: {
      minTlsVersion: '1.2'
      appSettings: concat(settings, insightsSettings, signingSettings)
    }
  }
  dependsOn: [
    packages
  ]
}

module subscribed 'subscription.bicep' = {
  name: 'imds-bridge-function-subscription'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    name: subscriptionName
    receiverIds: [
      app.identity.principalId
    ]
  }
}

module roles 'functionroles.bicep' = {
  name: 'imds-bridge-function-roles'
  params: {
    storageName: storage.name
    insightsName: name
    hasInsights: !empty(workspaceId)
    principalId: app.identity.principalId
  }
}
